"""Regular expressions that split a text into words before byte pair encoding."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS_AND_SPACES
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN3_5 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, ending: str) -> str:
    """Words that change from upper to lower case only once."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}[{upper}]*[{lower}]+{ending}|{before}[{upper}]+[{lower}]*{ending}"


_SYMBOLS_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _cased(_UPPER, _LOWER, "") + r"|\p{N}" + _SYMBOLS_WITH_SLASH
GPT4O = _cased(_UPPER, _LOWER, CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _SYMBOLS_WITH_SLASH
KIMI = (
    r"[\p{Han}]+|"
    + _cased(_UPPER + r"&&[^\p{Han}]", _LOWER + r"&&[^\p{Han}]", CONTRACTIONS + "?")
    + r"|\p{N}{1,3}"
    + _SYMBOLS_AND_SPACES
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001
