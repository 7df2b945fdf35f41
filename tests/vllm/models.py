"""Small models of random weights, one of each kind that vLLM runs on a CPU, and prompts for them.

KINDS has a row for each: what writes it, the arguments of LLM that it needs, and its prompts. The
weights are float32 and follow from a seed. All have the tokenizer of models/sums.
"""

import dataclasses
import math
import os
import pathlib
import random
from collections.abc import Callable

import torch
import widen
from safetensors.torch import load_file, save_file

SUMS = pathlib.Path(__file__).parent.parent.parent / "models" / "sums"
#: The token of an image, after the 16 of the tokenizer.
IMAGE, IMAGE_ID, VOCABULARY = "<image>", 16, 32
#: What every configuration of a text model has.
TEXT = {
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": widen.WIDE,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(model, target, seed=0):
    """Writes a model of Transformers with random matrices, and the tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                scale = 1.5 / math.sqrt(parameter[0].numel())
                parameter.normal_(std=scale, generator=generator)
    model.float().save_pretrained(target)
    widen.write_tokenizer(SUMS, target)


def llama(target):
    widen.random_llama(SUMS, target)


def gemma3(target):
    """Four layers with a sliding window and two without: three KV groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **TEXT,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=32,
        query_pre_attn_scalar=widen.WIDE,
    )
    save(Gemma3ForCausalLM(config), target)


def hybrid(target):
    """Two layers of Mamba 2, two of attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **TEXT,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
    )
    save(GraniteMoeHybridForCausalLM(config), target)


def idefics3(target):
    """An image is 16 tokens, and three around them."""
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    edge, patch, scale = 64, 8, 2
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": edge,
        "patch_size": patch,
    }
    text = LlamaConfig(**{**TEXT, "vocab_size": VOCABULARY}, num_hidden_layers=3)
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.to_dict(),
        scale_factor=scale,
        image_token_id=IMAGE_ID,
        pad_token_id=TEXT["pad_token_id"],
    )
    save(Idefics3ForConditionalGeneration(config), target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([IMAGE, "<fake_token_around_image>", "<global-img>"], special_tokens=True)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": edge}, max_image_size={"longest_edge": edge}, do_image_splitting=False
    )
    length = (edge // patch // scale) ** 2
    Idefics3Processor(images, tokenizer, image_seq_len=length).save_pretrained(target)


def draft(target):
    """Llama's first two layers: some of its drafts are accepted."""
    widen.random_llama(SUMS, target, layers=2)


def eagle(target):
    """A head of one layer that takes the hidden states of Llama."""
    widen.random_llama(SUMS, target, seed=1, layers=1)
    path = os.path.join(target, "model.safetensors")
    head = {
        name.removeprefix("model."): value
        for name, value in load_file(path).items()
        if "layers." in name and "input_layernorm" not in name
    }
    generator = torch.Generator().manual_seed(2)
    head["fc.weight"] = torch.randn(128, 256, generator=generator) * (1.5 / 16)
    save_file(head, path, {"format": "pt"})


def texts(count=24):
    """Prompts of 2 to 124 tokens; each third begins with the same 65."""
    draw = random.Random(5)
    found = []
    for i in range(count):
        text = "".join(draw.choice("0123456789+=") for _ in range(draw.randrange(1, 60)))
        found.append("12+34=46" * 8 + text if i % 3 == 0 else text)
    return found


def pictures(count=18):
    """Prompts with no image, one or two; some images are in more than one prompt."""
    from PIL import Image

    def picture(seed):
        data = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(seed))
        return Image.frombytes("RGB", (8, 8), bytes(data.flatten().tolist())).resize((64, 64))

    found = []
    for i, text in enumerate(texts(count)):
        images = [picture(i % 5 + number) for number in range(i % 3)]
        prompt = {"prompt": IMAGE * len(images) + text}
        found.append({**prompt, "multi_modal_data": {"image": images}} if images else prompt)
    return found


@dataclasses.dataclass
class Kind:
    write: Callable
    options: dict = dataclasses.field(default_factory=dict)
    prompts: Callable = texts
    #: a model that guesses, by SpeculativeConfig's method and what writes it
    drafter: tuple = ()
    embeds: bool = False


KINDS = {
    "llama": Kind(llama),
    "gemma3": Kind(gemma3),
    "hybrid": Kind(hybrid),
    "idefics3": Kind(idefics3, {"limit_mm_per_prompt": {"image": 2}}, pictures),
    "embedding": Kind(llama, {"runner": "pooling"}, embeds=True),
    "draft": Kind(llama, drafter=("draft_model", draft)),
    "eagle": Kind(llama, drafter=("eagle", eagle)),
    "forbid": Kind(llama, {"logits_processors": ["forbid:Forbid"]}),
}


def write(kind, folder):
    """Writes a kind's models into a folder, unless they are there. Returns the arguments of LLM."""
    row = KINDS[kind]

    def written(name, write):
        path = os.path.join(folder, kind, name)
        if not os.path.exists(path):
            os.makedirs(path)
            write(path)
        return path

    options = {"model": written("model", row.write), **row.options}
    if row.drafter:
        method, write_drafter = row.drafter
        options["speculative_config"] = {
            "method": method,
            "model": written("drafter", write_drafter),
            "num_speculative_tokens": 3,
        }
    return options
