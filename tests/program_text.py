"""Text to train the examples on: a small program, the same each time."""

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n\n" for i in range(300))
