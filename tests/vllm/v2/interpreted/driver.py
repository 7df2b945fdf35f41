from triton.backends.driver import DriverBase


class Driver(DriverBase):
    @classmethod
    def is_active(cls):
        return False

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")

    def get_current_target(self):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")

    def get_active_torch_device(self):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")

    def get_benchmarker(self):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")
