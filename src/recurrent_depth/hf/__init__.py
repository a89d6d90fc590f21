"""Hugging Face: native models, and recurrence grafted onto pretrained ones. Imports transformers."""

__all__: list[str] = []
