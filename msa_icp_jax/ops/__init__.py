"""The stages of the indexer, one folder each.

In every folder `__init__.py` holds the public function with its checks and the choice of the
backend, `xla.py` the plain definition and `mosaic.py` the Hopper kernel.
"""
