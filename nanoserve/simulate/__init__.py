"""`nanoserve simulate`: the scheduler that serves, driven by a cost model instead of a device.

costs       seconds of a step; the file they are kept in
fit         measured steps -> costs
trace       who asks for what, when
forms       a step's rows, buckets and graphs, by attention read
simulator   the serving loop on a clock that the costs move
result      what it counted: percentiles, shapes, which graphs to warm
report      tables; picture: the drawing
calibrate   measures the costs of a real engine; live: real requests against one; the only modules that need torch
flags       the command line; command: what runs it
"""
