"""The former place of ``fusionlayer.CodecRules`` and ``CodecRule``, for scripts that import them from here."""

from ..deprecations import deprecated
from ..planning.codec_rules import CodecRule as Rule
from ..planning.codec_rules import CodecRules as Policy

__all__ = ["Policy", "Rule"]

deprecated("fusionlayer.scheduler.policy", "import CodecRules and CodecRule from fusionlayer", gone="0.3")
