"""What instruct models write between their marks: thinking and calls of tools, taken apart as the text comes."""
