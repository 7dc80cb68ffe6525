"""Conversations that outlive a turn, a process and their place in memory."""
