/* A model, not a measurement, of decoding on a device that waits for its memory alone: in each step it reads the
 * weights once, and the keys and values that the step's queries see. */
#pragma once

typedef struct device {
    double hbm;     /* bytes a second; 0: no device */
    double weights; /* bytes read in each step beside keys and values */
} device;

/* "hbm=3.35TB/s", "hbm=900GB/s,weights=270MB": decimal units B, kB, MB, GB, TB; weights are 0 unless given. ERR_USAGE
 * names what is wrong. */
int device_parse(const char *source, device *out);

/* Microseconds of a step that reads so many bytes of keys and values. */
double device_decode_us(const device *d, double kv_bytes);
