"""Common ground: errors, formats, files, values and facts about the host."""
