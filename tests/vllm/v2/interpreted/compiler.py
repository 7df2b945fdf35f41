from triton.backends.compiler import BaseBackend


class Backend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return False

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")

    def add_stages(self, stages, options, language):
        raise NotImplementedError("TRITON_INTERPRET=1 is not set")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
