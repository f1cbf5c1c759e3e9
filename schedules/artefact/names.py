"""What the functions of an artefact are called.

Of one workload they are flash_attention_forward and flash_attention_backward, and these with _variant and _bucket behind them. Of several,
each workload has functions of its own: behind forward or backward stands the workload's name without its fwd, with an underscore for
whatever is no letter, digit or underscore. Those of fwd_d64_dv64_f16_window+my.scores:half begin with
flash_attention_forward_d64_dv64_f16_window_my_scores_half. flash_attention_manifest is that of the artefact.
"""
import re
from dataclasses import dataclass

FORWARD, BACKWARD, MANIFEST = "flash_attention_forward", "flash_attention_backward", "flash_attention_manifest"
#: What may stand behind the first two: the same by a variant of the caller's choice, and which bucket of lengths calls are nearest to.
ENDS = ("", "_variant", "_bucket")


@dataclass(frozen=True)
class Share:
    """What a workload has of an artefact for itself.

    ending       what its functions have behind forward and backward; "": the artefact holds no other workload
    first_place  of its variants, which name generated functions: those of all workloads have names of their own
    """

    ending: str = ""
    first_place: int = 1

    @property
    def forward(self):
        return FORWARD + self.ending

    @property
    def backward(self):
        return BACKWARD + self.ending

    def functions(self):
        """All names that the workload may have in the artefact."""
        return [function + end for function in (self.forward, self.backward) for end in ENDS]


#: Of an artefact of one workload.
ALONE = Share()


def ending_of(workload):
    """What the functions of a workload have behind forward and backward in an artefact of several."""
    return "_" + re.sub(r"\W", "_", workload.name.removeprefix("fwd_"), flags=re.ASCII)
