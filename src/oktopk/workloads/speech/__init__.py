"""LSTM speech recognition: corpora, features, model, loss and error rates."""
