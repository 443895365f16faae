import pytest

from lit_rl.models.character_tokenizer import character_tokenizer


@pytest.fixture
def tokenizer():
    """One token per character, a begin token (id 1) in front of each text; no chat template."""
    return character_tokenizer("0123456789+=>: \nabcdefghijklmnopqrstuvwxyz")


@pytest.fixture
def chat_tokenizer(tokenizer):
    """Its chat template renders the begin token and marks turns by role."""
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer
