"""What the commands do, as functions of Python: `export`, `bench`, `train`, `tune` and `import_checkpoint`.

The commands parse, call and print.
"""
