"""What prompts and steps share: the registry of executors, the context of a device, facts about
weights and shapes.
"""
