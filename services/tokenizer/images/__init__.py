"""Images of messages: reading, sizing for the model, publishing, and their place in the prompt."""
