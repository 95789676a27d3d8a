"""The SCONE model as a Transformers model, the f-gram model inside it, and their registration."""

from scone.models.config import SconeConfig
from scone.models.fgram_model import FGramModel
from scone.models.fusion import Fusion
from scone.models.scone_model import RowSource, SconeForCausalLM

__all__ = ["SconeConfig", "SconeForCausalLM", "FGramModel", "Fusion", "RowSource", "register"]


def register() -> None:
    """Make AutoConfig and AutoModelForCausalLM know the model type "scone". Safe to repeat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.register(SconeConfig.model_type, SconeConfig, exist_ok=True)
    AutoModelForCausalLM.register(SconeConfig, SconeForCausalLM, exist_ok=True)


register()
