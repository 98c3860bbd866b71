"""PolicyAttention, reproduced: softmax attention as policy mirror descent, from identity to trained controllers."""

__version__ = "0.1.0"
