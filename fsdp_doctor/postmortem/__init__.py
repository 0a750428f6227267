"""From what logs hold to the first failure, its victims, and ranked causes.

``examine`` is the door: logs in, ``PostMortem`` out. Causes and rules are data (``causes``,
``rules``).
"""

from fsdp_doctor.postmortem.examine import PostMortem, examine
from fsdp_doctor.postmortem.payload import postmortem_payload

__all__ = ["PostMortem", "examine", "postmortem_payload"]
