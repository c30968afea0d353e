"""Training: data, attribution, losses, and the two stages that make a student. Used by `adtp-train` and `adtp-tune`.

Third-party `accelerate` and `datasets` come with ``pip install 'adtp-export[train]'``.
"""
