"""CrashSafeScheduler: no kill loses its queue."""
