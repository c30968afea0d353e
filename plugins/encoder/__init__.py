"""Triton kernels of a whole encoder around attention, compiled ahead of time; live counts stay on the device.

- `ids`, `product`, `norm`, `cut`, `head`: the kernels. Each docstring has its arguments, its grid and its order of additions. A
  classifier has none of its own: it is products of indexed first rows.
- `variants`: which of them are compiled, for which dtypes and sizes.
- `binaries`: reads `kernels/encoder.zip.xz`, which `plugins.ahead_of_time` compiles from that table; needs neither Triton nor a GPU.
- `description`: what an encoder computes. `planner`: the plan of its launches for each size of a call, with `launches`, `cuts`,
  `heads`, `grids` and `arena`; `checks` refuses what has no kernel. They need no Triton.
"""
