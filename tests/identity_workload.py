"""What the tests of token identity ask of an engine, and what of the answer has to be the same.

The output is a function of prompt, parameters and seed, whatever drafts and however it runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.sampling_params import SamplingParams
from outrider.llm import LLM
from outrider.outputs import RequestOutput
from tests.tiny_models import EOS_TOKEN_ID
from verifier_svc.front.admission import build_requests
from verifier_svc.front.output_stream import OutputStream

VOCAB_SIZE = 320
MAX_MODEL_LEN = 160

# Only a few tokens can win, so that n-grams repeat and drafts are accepted, also at a high temperature.
FEW_TOKENS = dict.fromkeys((40, 41, 42, 43, EOS_TOKEN_ID), 60.0) | {EOS_TOKEN_ID: 55.0}


def everything(seed: int, temperature: float) -> SamplingParams:
    """Every sampling parameter at once."""
    return SamplingParams(
        temperature=temperature,
        top_p=0.95,
        top_k=40,
        min_p=0.005,
        repetition_penalty=1.05,
        presence_penalty=0.1,
        frequency_penalty=0.02,
        logit_bias=FEW_TOKENS,
        bad_words=["()*", "+("],
        bad_words_token_ids=((42, 42, 42),),
        min_tokens=8,
        max_tokens=44,
        stop_token_ids=(77,),
        stop=["))(()"],
        seed=seed,
        n=2,
        logprobs=2,
        prompt_logprobs=1,
    )


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=44, ignore_eos=True),
    "random": SamplingParams(temperature=1.0, max_tokens=44, seed=3, logit_bias=FEW_TOKENS, ignore_eos=True),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=44, seed=4, logit_bias=FEW_TOKENS),
    "everything greedy": everything(5, 0.0),
    "everything warm": everything(6, 0.8),
    "everything hot": everything(7, 1.3),
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    prompts: list[list[int]] = []
    for length in (1, 3, 15, 16, 17, 33, 64, 90):
        piece = [rng.choice((40, 41, 42, 43, rng.randrange(256))) for _ in range(rng.randint(3, 12))]
        prompts.append((piece * length)[:length])
    return prompts


PROMPTS = make_prompts()
MIXED = [PARAMS[name] for name in (*PARAMS, "random", "everything warm")]


def visible(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a caller sees, but the draft statistics."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, [list(entry) for entry in o.logprobs or []])
        for output in outputs
        for o in output.outputs
    ]


def resume(llm: LLM, prompt: list[int], received: list[int], params: SamplingParams) -> OutputStream:
    """What a client does when a verifier dies: prompt + received tokens, same parameters, same seed, another engine.

    Args:
        llm: idle.
        prompt: of the whole output.
        received: its first tokens.
        params: n = 1.

    Returns:
        What came after them; its text is that of the whole output.
    """
    (request,) = build_requests("r", prompt + received, params, llm._served, num_output_tokens=len(received))
    stream = OutputStream(request, llm._served.tokenizer)
    engine = llm._engine
    engine.add(request)
    while stream.finish_reason is None:
        for event in engine.step():
            tokens, reason = event.tokens, event.finish_reason
            stream.add(tokens, event.num_draft_tokens, event.num_accepted_tokens, reason, event.logprobs)
    engine.abort("r")
    engine.drain()
    return stream


def greedy_of_transformers(
    directory: Path, architecture: str, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """The oracle: greedy outputs of transformers on a CPU in float32, one prompt at a time, end tokens ignored."""
    import transformers

    model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()
    outputs: list[list[int]] = []
    for prompt in prompts:
        with torch.inference_mode():
            generated = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs
