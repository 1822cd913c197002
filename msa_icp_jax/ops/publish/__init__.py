"""One-sided publish: candidate rows straight into the memory of the ranks that own their heads.

It is a matter of device addresses, so there is a kernel (`mosaic`) and no plain definition; where
the addresses are not known, `comm.exchange` carries the same rows to the same places.
"""
