"""The benchmark: cudackpt beside stock CRIU on GPU memory as real programs have it.

`cudackpt bench` runs it; docs/performance.md says how it measures.
"""
