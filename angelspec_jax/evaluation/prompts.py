"""Prompts to measure with: the project's own few per domain, or JSONL files with a {"prompt"} a line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

DOMAINS = ("maths", "code", "chat")


def builtin(domain: str, count: int | None = None) -> list[str]:
    """The project's own prompts of a domain, the first `count` of them. None of them was trained on."""
    if domain not in DOMAINS:
        raise ValueError(f"there are no prompts for domain {domain!r}; there are {', '.join(DOMAINS)}")
    return read(Path(__file__).with_name(f"{domain}.jsonl"), count)


def read(path: str | Path, count: int | None = None) -> list[str]:
    """The prompts of a JSONL file, the first `count` of them. Raises FileNotFoundError, or ValueError naming file and line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f'prompt file {path} does not exist; it should be a JSONL file with {{"prompt": TEXT}} on every line')
    found: list[str] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if count is not None and len(found) >= count:
            break
        if line.strip():
            found.append(_parse(line, f"{path}, line {number}"))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def read_domains(paths: Sequence[str | Path], count: int | None = None) -> Mapping[str, list[str]]:
    """Prompts by domain, which is a file's name without its ending; without files the project's own."""
    if not paths:
        return {domain: builtin(domain, count) for domain in DOMAINS}
    domains: dict[str, list[str]] = {}
    for path in paths:
        name = Path(path).name.split(".")[0]
        if name in domains:
            raise ValueError(f"two prompt files are named {name}; the name is the domain, so rename one of them")
        domains[name] = read(path, count)
    return domains


def _parse(line: bytes, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON ({error})") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{place}: must be an object with a non-empty text under "prompt"')
    return prompt
