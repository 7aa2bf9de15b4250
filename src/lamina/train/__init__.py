"""`lamina train`: from nothing to a trained model, and fine-tuning of real ones. `cli` begins, `loop` trains."""
