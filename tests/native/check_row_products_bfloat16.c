#define BFLOAT16 1
#define linear linear_bfloat16
#include "check_row_products.h"

int check_row_products_bfloat16(void) { return check_products(); }
