"""What the commands do, as functions of Python: `export`, `bench` and `train`. The commands parse, call and print."""
