"""Triton kernels of a whole encoder around attention, compiled ahead of time; live counts stay on the device.

- `ids`, `product`, `norm`, `cut`: the kernels. Each docstring has its arguments, its grid and its order of additions. Heads have none
  of their own: they are products of indexed first rows.
- `variants`: which of them are compiled, for which dtypes and sizes.
- `build`: compiles them into `kernels/encoder.zip`; needs Triton, no GPU.
- `binaries`: reads that archive; needs neither.
- `description`: what an encoder computes. `planner`: the plan of its launches for each size of a call, with `launches`, `cuts`,
  `grids` and `arena`; `checks` refuses what has no kernel. They need no Triton.
"""
