"""A logits processor without state, for logits_processors=["forbid:Forbid"]."""

from vllm.v1.sample.logits_processor import LogitsProcessor


class Forbid(LogitsProcessor):
    """No request samples the token that reads "7"."""

    TOKEN = 10

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        logits[:, self.TOKEN] = float("-inf")
        return logits
