"""The ragged attention plugin: Triton kernels, compiled ahead of time, and the hosts that launch them.

- `variants`: the table of what is compiled.
- `kernel`: the kernels of attention; needs Triton.
- `ahead_of_time`: compiles a table into `kernels/`, this one and that of `encoder/`; needs Triton, no GPU.
- `binaries`: reads `kernels/` and chooses; `driver` loads and launches through the CUDA driver.
- `plan`: what is launched for each size of a call; `runner` runs it as CUDA graphs, by `cpp/runner.h`.
- `pytorch`: attention on CUDA tensors. `tensorrt`: the Python host. `cpp/`: the C++ host, built by `library`.
- `encoder/`: kernels of all that an encoder does around attention, compiled alike.
- `examples/`: applications that run plugin engines.

Shipped as `adtp_export.plugins`.
"""
