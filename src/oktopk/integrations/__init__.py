"""Callbacks for training frameworks, one module each; only that module imports the framework.

`lightning.Compress` is for Lightning's Trainer, `transformers.CompressCallback` for Hugging Face's.
Accelerate needs neither: `oktopk.attach` takes the model that `Accelerator.prepare` returns.
"""
