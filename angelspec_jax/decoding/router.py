"""Which drafter a request gets, where an engine holds several: the caller's word, or what the prompt looks like.

No drafter is best everywhere: block drafters win on code and maths, MTP comes close on chat (AngelSpec section 1). The classifier reads
the last message with a few patterns; it costs microseconds, and a wrong guess costs speed alone.
"""

import dataclasses
import re
from collections.abc import Mapping

DOMAINS = ("code", "maths", "chat")

CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+[:({]|#include|=>|;\s*$|\b(?:python|javascript|typescript|java|rust|golang|c\+\+|sql|regex|bash|html|css|"
    r"code|function|program|script|algorithm|compile[rd]?|unit tests?|debug|refactor|implement|api|json|array|recursion)\b",
    re.IGNORECASE | re.MULTILINE,
)
MATHS = re.compile(
    r"\\(?:frac|boxed|sum|int|sqrt)|\$[^$]+\$|\d\s*[-+*/^=]\s*\d|\d\s*%|\b(?:how many|how much|calculate|compute|solve|equation|prove|"
    r"theorem|integral|derivative|probability|percent|triangle|remainder|divisible|polynomial|average|ratio|altogether|in total|prime|"
    r"perimeter)\b",
    re.IGNORECASE,
)


def classify(text: str) -> str:
    """"code", "maths" or "chat", by what speaks for each; numbers make maths where nothing speaks of code."""
    code, maths = len(CODE.findall(text)), len(MATHS.findall(text))
    maths += code == 0 and len(re.findall(r"\d+", text)) >= 2
    if code == maths == 0:
        return "chat"
    return "code" if code >= maths else "maths"


@dataclasses.dataclass(frozen=True)
class Router:
    """Drafter names by domain; what is not listed gets the default. None decodes without drafts."""

    routes: Mapping[str, str | None]
    default: str | None = None

    def __post_init__(self):
        unknown = set(self.routes) - set(DOMAINS)
        if unknown:
            raise ValueError(f"a router knows the domains {', '.join(DOMAINS)}, not {', '.join(sorted(unknown))}")

    def choose(self, text: str) -> str | None:
        """The drafter for a prompt."""
        return self.routes.get(classify(text), self.default)
