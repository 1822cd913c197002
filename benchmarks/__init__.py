"""Times of the kernels against the machine's own ceilings: `python -m benchmarks --help`.

cases.py says what is measured and its floor, stages.py what is run, timing.py how it is timed,
check.py what must hold before a time counts, run.py takes the figures, results.py keeps them.
baselines.py is what the kernels are compared with; jax_chain.py, exchange.py and host.py measure
inside a program, between GPUs and the host's time; record.py takes everything in one go, report.py
and plot.py show it.
"""
