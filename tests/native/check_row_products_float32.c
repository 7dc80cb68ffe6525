#define BFLOAT16 0
#define linear linear_float32
#include "check_row_products.h"

int check_row_products_float32(void) { return check_products(); }
