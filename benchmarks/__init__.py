"""Times of the kernels against the machine's own ceilings: `python -m benchmarks --help`.

cases.py says what is measured and its floor, stages.py what a stage runs, timing.py and graph.py
how it is timed, check.py what must hold before a time counts, results.py what a run leaves behind.
baselines.py and peers.py are what the kernels are compared with. sweep.py and model.py tell how
times grow, exchange.py and links.py measure between GPUs, host.py the host's time, record.py takes
everything in one go, report.py, plot.py and documents.py show it.
"""
