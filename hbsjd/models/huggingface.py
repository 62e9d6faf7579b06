"""Models of the optional package transformers: the T5 whose features a text-conditional (t2i) LlamaGen takes.

The official pipeline cleans a caption twice, in PixArt's style, before its T5 sees it; here every text is taken as it is given.

Shapes: B captions, L tokens, C features of a token.
"""
from __future__ import annotations

import torch

from hbsjd.models.captions import SLOTS, Captions, pad
from hbsjd.models.checkpoints import default_device

AT_ONCE = 32  # captions in one forward of T5


def t5_features(
    texts: list[str], model_name: str = "google/flan-t5-xl", *, length: int = SLOTS, dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> Captions:
    """Captions of `texts` through a T5 encoder (default: the official models' one), by the optional package transformers.

    `model_name` is a name on the hub or a local folder. A text is taken as it is given (no cleaning), and refused, not cut, where it has more than
    `length` tokens. On CUDA where there is one, unless `device` says otherwise. Raises ValueError, too, where the package or the T5 cannot be had.
    """
    from huggingface_hub import constants

    try:
        from transformers import AutoTokenizer, T5EncoderModel
    except ImportError:
        raise ValueError("caption features need the package transformers: pip install transformers, or compute them elsewhere and captions.read them") from None
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(model_name), T5EncoderModel.from_pretrained(model_name, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"no T5 as {model_name!r}: not a folder of a tokenizer and an encoder, not in {constants.HF_HUB_CACHE} (HF_HOME sets it), and the hub was not "
            f"reached (HF_HUB_OFFLINE = {int(constants.HF_HUB_OFFLINE)}); download it, or captions.read features made elsewhere"
        ) from error
    return encode(texts, tokenizer, model.to(device or default_device()).eval(), length)


@torch.no_grad()
def encode(texts: list[str], tokenizer, model, length: int = SLOTS) -> Captions:
    """Captions of `texts`: a T5 encoder's last hidden states of their tokens, the end mark included, each text as if it were encoded alone."""
    if isinstance(texts, str):
        raise ValueError(f"texts must be a list of captions; got one: pass [{texts[:40]!r}]")
    tokens = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    for number, ids in enumerate(tokens):
        if len(ids) > length:
            raise ValueError(f"caption {number} has {len(ids)} tokens, its end mark included, and the model takes {length}; shorten {texts[number][:40]!r}")
    features = []
    for some in (tokens[i : i + AT_ONCE] for i in range(0, len(tokens), AT_ONCE)):
        ids_BL = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        mask_BL = torch.arange(ids_BL.shape[1]) < torch.tensor([len(ids) for ids in some])[:, None]
        hidden_BLC = model(input_ids=ids_BL.to(model.device), attention_mask=mask_BL.long().to(model.device)).last_hidden_state
        features += [hidden_LC[: len(ids)] for hidden_LC, ids in zip(hidden_BLC, some)]
    return pad(features, length)
