"""How a text is split before byte pair encoding, by ``tokenizer.ggml.pre``.

The steps are those of the models' own tokenizer.json, to which llama.cpp's regular expressions are meant to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from lightserve.model_files.tokenizer.files import splits

_DIGITS = r"\p{N}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# upper and lower case letters of the Latin, Greek, Cyrillic and some smaller scripts, as in the model's tokenizer.json
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    _DIGITS,
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# digits in threes from the last one; Chinese, Japanese, Korean and scripts of South-East Asia
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f"
    "\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK_V3[-1],
)
_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", splits.GPT4O)
_MINICPM5 = (r"\p{N}{1,3}", splits.LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))


class PreTokenizer(NamedTuple):
    splits: Sequence[str] = ()  # regular expressions, each for the parts that the one before it leaves
    has_gpt2_split: bool = False  # after them, GPT-2's own
    is_nfc: bool = False
    keeps_whole_tokens: bool = False  # a part that is in the vocabulary becomes one token without merges
    adds_bos: bool = False  # unless the file has its own setting

    def steps(self) -> pre_tokenizers.PreTokenizer:
        parts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.has_gpt2_split)
        return pre_tokenizers.Sequence([*parts, byte_level])


class _FalconPreTokenizer(PreTokenizer):
    """Digits are grouped after GPT-2's split."""

    def steps(self) -> pre_tokenizers.PreTokenizer:
        digits = pre_tokenizers.Digits(individual_digits=False)
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
        punctuation = pre_tokenizers.Punctuation(behavior="contiguous")
        return pre_tokenizers.Sequence([punctuation, super().steps(), digits, threes])


_GPT2 = PreTokenizer(has_gpt2_split=True)
_GPT2_NFC = PreTokenizer(has_gpt2_split=True, is_nfc=True)
_SINGLE_DIGITS = PreTokenizer([_DIGITS], has_gpt2_split=True)
_LLAMA3 = PreTokenizer([splits.LLAMA3], keeps_whole_tokens=True, adds_bos=True)
_CL100K = PreTokenizer([splits.LLAMA3], keeps_whole_tokens=True)
_QWEN2 = PreTokenizer([splits.QWEN2], is_nfc=True)
_O200K = PreTokenizer([splits.GPT4O], keeps_whole_tokens=True)
_BLOOM = PreTokenizer([splits.BLOOM])
_BAILING = PreTokenizer([splits.BAILING])

PRE_TOKENIZERS = {
    **dict.fromkeys(["default", "gpt-2", "phi-2", "gigachat", "jais", "trillion", "exaone4", "granite-docling"], _GPT2),
    **dict.fromkeys(["mpt", "olmo"], _GPT2_NFC),
    **dict.fromkeys(["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"], _SINGLE_DIGITS),
    "command-r": _SINGLE_DIGITS._replace(is_nfc=True),
    **dict.fromkeys(
        ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], _LLAMA3
    ),
    **dict.fromkeys(["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], _CL100K),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"], _QWEN2),
    "qwen35": PreTokenizer([splits.QWEN3_5], is_nfc=True),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "minimax-m2"], _O200K),
    "tekken": PreTokenizer([splits.TEKKEN], keeps_whole_tokens=True, adds_bos=True),
    "kimi-k2": PreTokenizer([splits.KIMI], keeps_whole_tokens=True),
    "seed-coder": PreTokenizer([splits.SEED]),
    "minicpm5": PreTokenizer(_MINICPM5),
    **dict.fromkeys(["tiny_aya", "cohere2moe"], PreTokenizer(_AYA, is_nfc=True)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "joyai-llm"], PreTokenizer(_DEEPSEEK_V3)),
    "afmoe": PreTokenizer(_AFMOE),
    "falcon": _FalconPreTokenizer(has_gpt2_split=True),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], _BLOOM),
    "viking": PreTokenizer([splits.BLOOM, _DIGITS]),
    **dict.fromkeys(["bailingmoe", "bailingmoe2", "llada-moe"], _BAILING),
}
