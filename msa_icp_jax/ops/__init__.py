"""The stages of the indexer, one folder each.

In every folder `__init__.py` holds the public function with its checks and the choice of the
backend, `xla.py` the plain definition, `kernel.py` the Hopper kernel, from its launch to its pieces
(those that need a file of their own beside it), and `config.py` what was tuned and why.
"""
