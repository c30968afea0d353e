"""Pruned encoders: any backbone, any way to choose tokens, any head; padded (the oracle) and packed (what is exported).

Importing this room registers the models with transformers' Auto classes.
"""

from .config import AdtpBertConfig, PrunedEncoderConfig
from .heads.embedding import PrunedEncoderForEmbedding
from .heads.sequence import AdtpBertForSequenceClassification, PrunedEncoderForSequenceClassification
from .heads.spans import PrunedEncoderForQuestionAnswering
from .heads.tokens import PrunedEncoderForTokenClassification

__all__ = [
    "AdtpBertConfig",
    "AdtpBertForSequenceClassification",
    "PrunedEncoderConfig",
    "PrunedEncoderForEmbedding",
    "PrunedEncoderForQuestionAnswering",
    "PrunedEncoderForSequenceClassification",
    "PrunedEncoderForTokenClassification",
]
