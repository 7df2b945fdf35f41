"""What programs do not import: the parts behind coxswain and coxswain.vllm."""
