"""The AD-TP student: configuration, checkpoint loading, padded form (the oracle), packed form (what is exported).

Importing this room registers the student with transformers' Auto classes.
"""

from .config import AdtpBertConfig
from .student import AdtpBertForSequenceClassification

__all__ = ["AdtpBertConfig", "AdtpBertForSequenceClassification"]
