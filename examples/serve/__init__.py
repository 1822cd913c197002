"""The parts of the serving example; `examples/serve.py` runs it, `docs/serving.md` explains it."""
