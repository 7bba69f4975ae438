"""The processes on a node: their start, end, deadlines and memory.

Start: agent (`zygote_client`) -> warden -> zygote -> a keeper for each group -> its ranks.
End: the keeper ends its ranks; the zygote what a dead keeper left; the warden everything below it
when the agent ends.
Deadlines: the worker watches that of a group; each rank has an alarm a little later; the agent
watches that of a group's end.
"""
