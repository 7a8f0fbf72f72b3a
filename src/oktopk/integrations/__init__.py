"""Compression in training frameworks, one module each; only that module imports the framework.

`lightning.Compress` is a callback for Lightning's Trainer, `transformers.CompressCallback` for
Hugging Face's. With Accelerate, `oktopk.attach` takes the model that `Accelerator.prepare` returns,
and `accelerate.checkpoint_with` makes its state a part of Accelerate's checkpoints.
"""
