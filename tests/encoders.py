"""Tiny SentenceTransformers of random weights, saved as folders, and texts for them."""

import tokenizers
import torch
import transformers

WORDS = ["the", "a", "key", "query", "value", "window", "of", "and", "few", "many", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


def words(count, seed=0):
    """A text of so many words, each a token, in sentences of about eleven."""
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=draw))


def tokenizer(around="[CLS] $A [SEP]"):
    """One of whole words that puts special tokens around a text as `around` says."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.Replace("\u200b", "")  # BERT's drops it, too
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=around, special_tokens=[(name, vocabulary[name]) for name in SPECIAL]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def bert(positions=64):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=15, max_position_embeddings=positions, initializer_range=0.3)
    return transformers.BertModel(config)


def modernbert(positions=4096):
    """Every third layer sees all keys, the others a window."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 3, "local_attention": 16, "initializer_range": 0.5}
    config = transformers.ModernBertConfig(**sizes, **IDS, vocab_size=15, max_position_embeddings=positions)
    return transformers.ModernBertModel(config)


def save_encoder(folder, model, *after, pooling="mean", prompts=None, around="[CLS] $A [SEP]", **more):
    """Save a SentenceTransformer of a model, pooling and the modules after it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model.save_pretrained(folder / "model")
    tokenizer(around).save_pretrained(folder / "model")
    first = Transformer(str(folder / "model"))
    modules = [first, Pooling(model.config.hidden_size, pooling, **more), *after]
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder / "encoder"))
    return folder / "encoder"
