#include "check.h"

int main(void) {
    int failed = check_low_bit() + check_best_scores();
    printf("%d differences\n", failed);
    return failed > 0;
}
