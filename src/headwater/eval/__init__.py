"""How good the answers are: measures of a model's predictions, taken through the engine that serves them."""
