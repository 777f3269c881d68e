"""Chat templates: messages to prompt ids, and the text that follows a turn."""
