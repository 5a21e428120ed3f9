"""Triton kernels of longbatch, one op per file: the maths, a torch reference `<op>_ref`, the kernel, one launcher.

Nothing here imports `longbatch`. Where Triton is absent (macOS, for one) only the references can be used.
"""
