"""Programs around gpustasis that a node does not need: the benchmark, the demo, the GPU check."""
